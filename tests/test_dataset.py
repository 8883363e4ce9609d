"""A sweep's folder: whole parts or none, damage found, nothing lost."""

import dataclasses
import errno
import io
import json
import os
import shutil
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import every_fault

from jaxrl_mini.config import Config, UserError
from jaxrl_mini.sweeps import dataset, table_part, tables
from jaxrl_mini.sweeps.dataset import HISTORY, RUNS, Dataset
from jaxrl_mini.sweeps.grid import Grid

SIZES = {"iterations": 3, "groups": 2, "group_size": 4, "eval_episodes": 8}
GRID = Grid.product(range(70), **SIZES, history_every=2)


@pytest.fixture(scope="module")
def parts():
    return [table_part.train_part(GRID, number) for number in range(GRID.parts)]


@pytest.fixture
def folder(tmp_path):
    return Dataset.create(tmp_path / "sweep", GRID, {})


@pytest.fixture
def full(folder, parts):
    for number, part in enumerate(parts):
        folder.commit(number, *part)
    return folder


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_what_is_committed_is_read_back(full, parts):
    runs, history = full.runs(), full.history()
    assert (runs.num_rows, history.num_rows) == (70, 140)
    assert runs.schema.equals(RUNS) and history.schema.equals(HISTORY)
    for name in ("seed", "after_exact_success_rate", "last_loss", "logits_crc32", "finite"):
        expected = np.concatenate([part[0][name] for part in parts])
        np.testing.assert_array_equal(runs[name].to_numpy(), expected)
    np.testing.assert_array_equal(history["loss"].to_numpy(), np.concatenate([part[1]["loss"] for part in parts]))
    assert runs["last_retained_episodes"].null_count == 70 and runs["iterations_to_90"].null_count == 70


def test_one_line_reads_it_with_pandas_polars_and_duckdb(full):
    path, expected = full.path, full.runs()["after_exact_success_rate"].to_numpy()
    (path / "runs" / ".000009.parquet.abc.writing").write_bytes(b"torn")
    np.testing.assert_array_equal(pd.read_parquet(path / "runs")["after_exact_success_rate"], expected)
    np.testing.assert_array_equal(pl.read_parquet(path / "runs/*.parquet")["after_exact_success_rate"], expected)
    found = duckdb.sql(f"select after_exact_success_rate from '{path}/runs/*.parquet' order by run").fetchnumpy()
    np.testing.assert_array_equal(found["after_exact_success_rate"], expected)
    assert len(pd.read_parquet(path / "history")) == 140
    assert full.runs().num_rows == 70


def test_a_leftover_of_a_killed_writer_is_read_by_nobody(full):
    for name in (".000000.parquet.0.writing", ".sweep.json.0.writing"):
        (full.path / name).write_bytes(b"torn")
    assert Dataset.open(full.path).runs().num_rows == 70 and full.present() == {0, 1}


def test_no_temporary_file_stays(full):
    assert set(contents(full.path)) == {"sweep.json"} | {
        f"{table}/{part:06d}.parquet" for table in ("runs", "history") for part in (0, 1)
    }


def test_the_same_part_twice_is_one_part(full, parts):
    before = contents(full.path)
    full.commit(0, *parts[0])
    assert contents(full.path) == before


def test_another_writers_other_numbers_are_an_error_and_change_nothing(full, parts):
    before, (runs, history) = contents(full.path), parts[0]
    other = {**runs, "last_loss": runs["last_loss"] + 1e-9}
    with pytest.raises(UserError, match="other numbers"):
        full.commit(0, other, history)
    assert contents(full.path) == before


def flips(data: bytes) -> list[int]:
    return sorted({*np.linspace(0, len(data) - 1, 60).astype(int).tolist(), 0, 4, len(data) - 1, len(data) - 5})


@pytest.mark.parametrize("table", ["runs", "history"])
def test_a_flipped_bit_is_found_or_changes_nothing(full, table):
    """Some bytes mean nothing (padding, the writer's name); all others are noticed."""
    file, whole = full.file(table, 0), full.file(table, 0).read_bytes()
    expected, found = full.read_part(table, 0), 0
    for position in flips(whole):
        torn = bytearray(whole)
        torn[position] ^= 4
        file.write_bytes(torn)
        try:
            assert full.read_part(table, 0).equals(expected)
        except dataset.Damaged:
            found += 1
    assert found > 40


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_torn_part_is_set_aside_named_and_written_anew(full, parts, length):
    before, file = contents(full.path), full.file("runs", 1)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(UserError, match="000001"):
        full.runs()
    damaged = full.set_damaged_aside(full.present())
    assert list(damaged) == [1] and "000001.parquet" in damaged[1] and str(full.path / "damaged") in damaged[1]
    assert full.present() == {0}
    full.commit(1, *parts[1])
    after = contents(full.path)
    (aside,) = set(after) - set(before)
    assert {name: data for name, data in after.items() if name != aside} == before


def test_a_part_that_another_tool_wrote_with_another_number_is_damage(full):
    """Its pages have checksums of their own then."""
    path = full.file("runs", 0)
    rows = pq.read_table(path)
    column = rows.column_names.index("after_successes")
    changed = pa.array([rows[column][0].as_py() + 1, *rows[column].to_pylist()[1:]], rows.schema.types[column])
    pq.write_table(rows.set_column(column, rows.schema.field(column), changed), path, write_page_checksum=True)
    with pytest.raises(dataset.Damaged, match="does not have the digest it was written with"):
        full.read_part("runs", 0)


def test_a_part_of_another_sweep_is_damage(full, tmp_path, parts):
    other = Dataset.create(tmp_path / "other", Grid.product(range(71), history_every=2), {})
    other.commit(0, *parts[0])
    other.file("runs", 0).replace(full.file("runs", 0))
    assert list(full.set_damaged_aside({0, 1})) == [0]


@pytest.mark.parametrize("table", ["runs", "history"])
def test_a_part_of_the_same_sweep_in_the_place_of_another_is_damage(full, table):
    full.file(table, 0).write_bytes(full.file(table, 1).read_bytes())
    with pytest.raises(dataset.Damaged, match="holds other runs than those of part 0"):
        full.read_part(table, 0)


def test_parts_of_another_version_or_device_are_refused_by_name(folder, tmp_path):
    here = {"jax": "0.10.1", "device_kind": "cpu", "python": "3.11.1"}
    one = Dataset.create(tmp_path / "other", GRID, here)
    one.refuse_other_runtime({**here, "python": "3.12.9"})
    Dataset.open(one.path).refuse_other_runtime(here)
    with pytest.raises(
        UserError, match=r"\(jax '0\.10\.1' there, '0\.10\.2' here, device_kind 'cpu' there, 'H200' here\)"
    ):
        one.refuse_other_runtime({**here, "jax": "0.10.2", "device_kind": "H200"})


def test_a_damaged_part_in_the_way_of_a_writer_is_set_aside(full, parts):
    before = contents(full.path)
    full.file("history", 0).write_bytes(b"PAR1")
    full.commit(0, *parts[0])
    assert {name: data for name, data in contents(full.path).items() if "damaged" not in name} == before


def test_a_part_counts_once_its_runs_are_there(full):
    full.file("history", 0).unlink()
    assert full.present() == {1}


def test_another_grid_in_the_folder_is_refused_by_name(folder):
    with pytest.raises(UserError, match=r"\(lr 0\.08 there, 0\.1 here\)"):
        Dataset.create(folder.path, Grid.product(GRID.seeds, **SIZES, lr=0.1, history_every=2), {})
    assert Dataset.create(folder.path, GRID, {"other": "machine"}).grid == GRID


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="other files"):
        Dataset.create(tmp_path, GRID, {})
    with pytest.raises(UserError, match="is a file"):
        Dataset.create(tmp_path / "thesis.tex", GRID, {})
    with pytest.raises(UserError, match="no sweep folder"):
        Dataset.open(tmp_path)
    assert set(contents(tmp_path)) == {"thesis.tex"}


def test_a_folder_that_another_process_begins_in_between_is_that_of_the_sweep(tmp_path, monkeypatch):
    listed, begun = Path.iterdir, []

    def begin_and_list(path):
        if not begun:
            begun.append(None)
            Dataset.create(tmp_path, GRID, {"other": "process"})
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", begin_and_list)
    assert Dataset.create(tmp_path, GRID, {}).runtime == {"other": "process"}


@pytest.mark.parametrize("change", ["schema_version", "grid_sha256", "grid", "torn", "list"])
def test_a_changed_sweep_json_is_refused(full, change):
    about = full.path / "sweep.json"
    data = json.loads(about.read_text())
    if change == "grid":
        data["grid"]["settings"][0]["lr"] = data["grid"]["settings"][0]["effective_lr"] = 0.5
    elif change in data:
        data[change] = "9"
    about.write_text({"torn": about.read_text()[:99], "list": "[]"}.get(change, json.dumps(data)))
    with pytest.raises(UserError, match=r"sweep\.json"):
        Dataset.open(full.path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=["full", "broken", "read-only"])
def test_every_failing_system_call_leaves_whole_parts_and_a_message(tmp_path, parts, code):
    for number, fault in enumerate(every_fault(code), 1):
        path = tmp_path / str(number)
        with fault() as failing:
            try:
                one = Dataset.create(path, GRID, {})
                for part, columns in enumerate(parts):
                    one.commit(part, *columns)
            except UserError as error:
                assert os.strerror(code) in str(error) and "\n" not in str(error)
            else:
                assert one.present() == {0, 1}
        again = Dataset.create(path, GRID, {})
        for part in again.present():
            assert again.read_part("runs", part).num_rows == GRID.part_runs(part)
        for part, columns in enumerate(parts):
            again.commit(part, *columns)
        files = {name: data for name, data in contents(path).items() if not name.startswith(".")}
        reference = {name: data for name, data in contents(tmp_path / "1").items() if not name.startswith(".")}
        assert files == reference
    assert number > 30 and failing.calls < number


def test_a_short_write_is_continued(tmp_path, monkeypatch, parts):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:1000]))
    one = Dataset.create(tmp_path / "sweep", GRID, {})
    one.commit(0, *parts[0])
    assert one.read_part("runs", 0).num_rows == 64


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_will_do(tmp_path, monkeypatch, parts, code):
    def no_link(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", no_link)
    one = Dataset.create(tmp_path / "sweep", GRID, {})
    for _ in range(2):
        for number, part in enumerate(parts):
            one.commit(number, *part)
    assert one.runs().num_rows == 70 and not [name for name in contents(one.path) if name.startswith(".")]


# Settings of a language model, and what was not evaluated


@pytest.fixture
def models(tmp_path):
    """A sweep over two models, evaluated exactly after iterations 2 and 3; the numbers are those of a table's runs."""
    hf = {"backend": "hf", "model": ["a", "b"], "dtype": [None, "bfloat16"], "exact_every": 2}
    grid = Grid.product([0], **hf, lr=0.08, **SIZES)
    folder = Dataset.create(tmp_path / "models", grid, {})
    for number in range(grid.parts):
        part = grid.part(number)
        runs, history = table_part.train_part(Grid.product([number], **SIZES), 0)
        labels = {"run": part.numbers, "setting": part.setting_numbers, "seed": part.seeds}
        history["exact_success_rate"] = np.where(history["iteration"] == 0, np.nan, history["exact_success_rate"])
        rows = {name: np.repeat(label, SIZES["iterations"]) for name, label in labels.items()}
        folder.commit(number, runs | labels, history | rows)
    return folder


def test_every_setting_is_a_column():
    fields = {field.name for field in dataclasses.fields(Config)}
    assert fields <= set(RUNS.names)


def test_runs_of_several_models_are_told_apart(models):
    rows = duckdb.sql(
        f"select backend, model, dtype, micro_batch, exact_every, count(*) from '{models.path}/runs/*.parquet' "
        "group by all order by model, dtype"
    ).fetchall()
    assert rows == [("hf", model, dtype, 4, 2, 1) for model in "ab" for dtype in ("bfloat16", "float32")]


def test_a_table_policy_has_no_model(full):
    row = full.runs().to_pylist()[0]
    names = ("backend", "model", "dtype", "micro_batch", "exact_every")
    assert [row[name] for name in names] == ["table", None, None, None, None]


def test_what_was_not_evaluated_is_null_and_the_rest_are_numbers(models):
    path = f"{models.path}/history/*.parquet"
    assert models.history()["exact_success_rate"].null_count == 4
    with_nulls = pl.read_parquet(path)["exact_success_rate"]
    ((highest, average, counted),) = duckdb.sql(
        f"select max(exact_success_rate), avg(exact_success_rate), count(exact_success_rate) from '{path}'"
    ).fetchall()
    assert 0 < average <= highest <= 1 and counted == 8
    assert (with_nulls.max(), with_nulls.mean()) == pytest.approx((highest, average))


def test_a_number_that_is_none_where_it_was_evaluated_stays(models):
    """A run that failed is not one that was not evaluated."""
    grid = models.grid
    runs, history = table_part.train_part(Grid.product([0], **SIZES), 0)
    runs, history = runs | {"run": np.array([1])}, history | {"run": np.full(3, 1)}
    runs |= {"setting": grid.part(1).setting_numbers}
    history |= {"setting": np.repeat(grid.part(1).setting_numbers, 3), "exact_success_rate": np.full(3, np.nan)}
    for table in ("runs", "history"):
        models.file(table, 1).unlink()
    models.commit(1, runs | {"seed": grid.part(1).seeds}, history | {"seed": np.repeat(grid.part(1).seeds, 3)})
    found = models.read_part("history", 1)["exact_success_rate"].to_pylist()
    assert found[0] is None and np.isnan(found[1]) and np.isnan(found[2])


@pytest.fixture(params=["sweep-version-1/table", "sweep-version-1/language", "sweep-version-2/table"])
def old(request, tmp_path, golden):
    """A folder that a version before wrote: without the columns of a task; the first also of a model, NaN for null."""
    return Path(shutil.copytree(golden / request.param, tmp_path / Path(request.param).name))


def test_a_folder_of_a_version_before_is_read_as_one_of_now(old):
    raw, found = (pq.read_table(old / "history"), Dataset.open(old))
    runs, history = found.runs(), found.history()
    assert runs.schema.equals(RUNS) and history.schema.equals(HISTORY)
    row, table = runs.to_pylist()[0], old.name == "table"
    names = ("backend", "model", "dtype", "micro_batch", "exact_every")
    assert row["task"] == "binary-search-repair" and row["after_held_out_exact_success_rate"] is None
    assert [row[name] for name in names] == (["table"] + [None] * 4 if table else ["hf", "tiny", "float32", 4, 2])
    expected = [None if np.isnan(value) else value for value in raw["exact_success_rate"].to_pylist()]
    assert history["exact_success_rate"].to_pylist() == expected and (None in expected) is not table
    assert found.set_damaged_aside(found.present()) == {}


def columns_of(path: Path) -> dict[str, np.ndarray]:
    """A file's columns as they were computed."""
    frame = pd.read_parquet(path)
    if "iterations_to_90" in frame:
        frame["iterations_to_90"] = frame["iterations_to_90"].fillna(-1)
    frame = frame.drop(columns=[*tables.MODEL_COLUMNS], errors="ignore").dropna(axis="columns", how="all")
    return {name: np.array(frame[name].tolist()) for name in frame}


def test_a_folder_of_a_version_before_goes_on_in_that_version(old):
    """All of its files have the same columns, as readers need it; a part that is there is the same part."""
    before, found = contents(old), Dataset.create(old, Dataset.open(old).grid, {})
    columns = {table: columns_of(found.file(table, 0)) for table in found.tables}
    schemas = {table: pq.read_schema(found.file(table, 0)).remove_metadata() for table in found.tables}
    rows = {table: found.read_part(table, 0) for table in found.tables}
    found.commit(0, columns["runs"], columns["history"])
    assert contents(old) == before
    for table in found.tables:
        found.file(table, 0).unlink()
    found.commit(0, columns["runs"], columns["history"])
    for table in found.tables:
        assert pq.read_schema(found.file(table, 0)).remove_metadata().equals(schemas[table])
        assert found.read_part(table, 0).equals(rows[table])


def test_pages_carry_checksums(full):
    data = bytearray(full.file("history", 0).read_bytes())
    place = pq.ParquetFile(full.file("history", 0)).metadata.row_group(0).column(4)
    data[place.data_page_offset + place.total_compressed_size - 3] ^= 1
    with pytest.raises(OSError, match=r"(?i)crc|checksum|corrupt"):
        pq.read_table(io.BytesIO(bytes(data)), page_checksum_verification=True)
