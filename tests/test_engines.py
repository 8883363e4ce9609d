"""Where parts are computed changes nothing in them."""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from jaxrl_mini.config import UserError
from jaxrl_mini.sweeps import engine, table_part
from jaxrl_mini.sweeps.dataset import Dataset
from jaxrl_mini.sweeps.engine import run_sweep, shard_parts
from jaxrl_mini.sweeps.grid import Grid

GRID = Grid.product([0, 7, 12345, *range(100, 700)], iterations=20, eval_episodes=8, history_every=10)


def files(dataset: Dataset) -> dict[str, bytes]:
    return {str(file.relative_to(dataset.path)): file.read_bytes() for file in sorted(dataset.path.glob("*/*.parquet"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return files(run_sweep(GRID, tmp_path_factory.mktemp("whole") / "out"))


def test_every_part_is_in_one_shard():
    for n in (1, 2, 3, 7, 20):
        found = [part for i in range(1, n + 1) for part in shard_parts(GRID, (i, n))]
        assert sorted(found) == list(range(GRID.parts))
    for shard in ((0, 1), (2, 1), (-1, 3)):
        with pytest.raises(UserError, match="--shard"):
            shard_parts(GRID, shard)


def test_progress_counts_every_run_once(tmp_path):
    first, again = [], []
    run_sweep(GRID, tmp_path / "out", shard=(1, 2), on_part=first.append)
    run_sweep(GRID, tmp_path / "out", on_part=again.append)
    assert first[0] == 0 and again[0] == sum(first) and sum(again) == GRID.runs


def test_a_failing_part_ends_the_sweep_with_its_error_and_keeps_the_others(tmp_path, monkeypatch, whole):
    train_part = table_part.train_part

    def failing(grid, number, **options):
        if number == 5:
            raise ZeroDivisionError("five")
        return train_part(grid, number, **options)

    monkeypatch.setattr(table_part, "train_part", failing)
    with pytest.raises(ZeroDivisionError, match="five"):
        run_sweep(GRID, tmp_path / "out")
    monkeypatch.undo()
    kept = files(Dataset.open(tmp_path / "out"))
    assert kept and all(whole[name] == data for name, data in kept.items())
    assert files(run_sweep(GRID, tmp_path / "out")) == whole


def test_closing_the_iterator_stops_the_threads(tmp_path):
    dataset = Dataset.create(tmp_path / "out", Grid.product(range(10**4), iterations=100, eval_episodes=1), {})
    threads, parts = threading.active_count(), engine.compute_locally(dataset, range(dataset.grid.parts))
    next(parts)
    assert threading.active_count() > threads
    parts.close()
    assert threading.active_count() == threads and len(dataset.present()) < 10


def test_another_engine_is_refused(tmp_path):
    with pytest.raises(UserError, match="abacus"):
        run_sweep(GRID, tmp_path / "out", engine="abacus")
    assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_a_ray_cluster_gives_the_same_files_though_a_worker_is_killed(tmp_path, whole):
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=3, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False,
        object_store_memory=10**8, _temp_dir=f"{tempfile.gettempdir()}/r{os.getpid()}",
    )  # fmt: skip
    killed: set[int] = set()

    def kill_one(runs: int) -> None:
        if runs and not killed:
            killed.add(worker())
            os.kill(min(killed), signal.SIGKILL)

    try:
        dataset = run_sweep(GRID, tmp_path / "out", engine="ray", on_part=kill_one)
    finally:
        ray.shutdown()
    assert killed and files(dataset) == whole


def worker() -> int:
    """The process of a Ray worker that is computing a part."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                name = (process / "cmdline").read_text()
                mine = descends(int(process.name))
            except OSError:
                continue
            if mine and name.startswith("ray::") and "compute" in name:
                return int(process.name)
        time.sleep(0.01)
    raise AssertionError("no Ray worker computes")


def descends(process: int) -> bool:
    """Whether a process was started by this one, or by one that was."""
    while process > 1:
        if process == os.getpid():
            return True
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return False


@pytest.mark.full
def test_a_cluster_that_is_not_there_is_one_line(tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1"):
        run_sweep(GRID, tmp_path / "out", engine="ray", address="127.0.0.1:1")
