"""What the whole suite may not do: skip a test in silence."""

import shutil
import subprocess
import sys
from pathlib import Path

SKIPPING = {
    "test_one.py": "import pytest\ndef test_one(): pytest.skip('one')\ndef test_good(): pass\n",
    "test_marked.py": "import pytest\n@pytest.mark.skipif(True, reason='two')\ndef test_marked(): pass\n",
    "test_file.py": "import pytest\npytest.importorskip('there_is_none')\ndef test_file(): pass\n",
    "test_known.py": "import pytest\n@pytest.mark.xfail\ndef test_known(): assert False\n",
}


def test_a_skipped_test_fails_where_none_may_be_skipped(tmp_path):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    for name, text in SKIPPING.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    for options, code, counts in [
        ([], 0, "1 passed, 3 skipped, 1 xfailed"),
        (["--no-skips"], 1, "1 failed, 1 passed, 1 xfailed, 2 errors"),
    ]:
        done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code and counts in done.stdout, done.stdout
    assert all(f"--no-skips: {reason}" in done.stdout for reason in ("Skipped: one", "Skipped: two", "Skipped: could"))
