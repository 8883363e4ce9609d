"""Brings the pictures of `results/` into the site; the pages link to them where they lie in the repository."""

from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]


def on_files(files, config):
    """Adds them."""
    for path in sorted((ROOT / "results").glob("*/*.svg")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, **_):
    """Links to them where they are in the site."""
    return markdown.replace("](../results/", "](results/")
