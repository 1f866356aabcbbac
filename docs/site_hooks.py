"""The site's pages from outside docs/, and its links: the README is the first page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Pages of the site -> files of the repository.
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose source is not in docs/."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the site. A file that is not on it becomes text."""
    source = ROOT / PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def mended(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups(default="")
        if "://" in target:
            return link.group(0)
        file = (source.parent / target).resolve().relative_to(ROOT)
        on_site = {origin: name for name, origin in PAGES.items()}.get(str(file))
        if on_site is None and file.parts[0] == "docs":
            on_site = "/".join(file.parts[1:])
        if str(file) == "examples" or file.parent == Path("examples"):
            on_site = "examples.md"
            anchor = "" if str(file) == "examples" else f"#{file.stem}"
        if on_site is None:
            name = text.strip("`")
            same = name == str(file)
            return f"`{file}`" if same else f"{name} (`{file}` in the repository)"
        up = "../" * page.file.src_uri.count("/")
        return f"{image}[{text}]({up}{on_site}{anchor})"

    return _LINK.sub(mended, markdown)
