"""What the site generates when it is built.

Reference pages list every public name of each package and every command with its flags; tutorials
are the notebooks of `examples/` with their outputs; `llms.txt` lists all pages for machines.
Equations, `$$ ... $$` and `$ ... $`, become MathML, so that pages need no script and no font from
elsewhere. GitHub shows the same source.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

import seecause
from seecause.cli import HELP, _import_all, app

CODE = re.compile(r"(^```.*?^```|^(?: {4}.*\n?)+|`[^`\n]+`)", flags=re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^\$\$(.+?)\$\$$", flags=re.MULTILINE | re.DOTALL)
PLUS_MINUS = re.compile(r"(?<=\d) ± (?=\d)")
INLINE = re.compile(r"(?<![\\$\w])\$([^$\n]+)\$(?![\w$])")
# links that work in a forge, to what generated pages are made from
SOURCE = re.compile(r"\]\(\.\./(?:examples/(\w+)\.ipynb|src/(seecause(?:/\w+)?)/__init__\.pyi)\)")
SHIM = "https://unpkg.com/iframe-worker/shim"
EXAMPLES = Path(__file__).parents[1] / "examples"


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {f"reference/{name}.md": text for name, text in _reference().items()}
    pages["reference/commands.md"] = _commands()
    for notebook in sorted(EXAMPLES.glob("*.ipynb")):
        pages[f"tutorials/{notebook.stem}.md"] = _tutorial(notebook)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Equations outside of code, as MathML; links to generated pages; the first sentences describe
    the page."""
    markdown = SOURCE.sub(_generated, markdown)
    if not page.meta.get("description"):
        page.meta["description"] = _description(markdown)
    pieces = CODE.split(markdown)
    pieces[::2] = [_replace(piece) for piece in pieces[::2]]
    return "".join(pieces)


def on_page_content(html: str, **_: Any) -> str:
    """A number stays on one line with its error."""
    return PLUS_MINUS.sub("\u00a0±\u00a0", html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The script that lets the search work from disk comes with the site."""
    return output.replace(SHIM, f"{'../' * page.url.count('/')}iframe-worker.js")


def on_post_template(output_content: str, **_: Any) -> str:
    """The page of a server for what is not found."""
    return output_content.replace(SHIM, "/iframe-worker.js")


def on_env(env: Any, config: Any, files: Files) -> Any:
    """Write `llms.txt`: each page with its title and its first sentences."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for file in files.documentation_pages():
        page = file.page
        lines.append(f"- [{page.title}]({page.url}): {page.meta.get('description', '')}")
    files.append(File.generated(config, "llms.txt", content="\n".join([*lines, ""])))
    return env


def _reference() -> dict[str, str]:
    """A page for each package with public names: functions, then classes, by name."""
    packages = [f"seecause.{m.name}" for m in pkgutil.iter_modules(seecause.__path__) if m.ispkg]
    pages = {}
    for package in ["seecause", *packages]:
        module = importlib.import_module(package)
        about = re.split(r"\n\n(?=\w+ {2,}\w)", inspect.getdoc(module) or "")[0]  # without files
        lines = [f"# {package}", "", about, ""]
        values = [getattr(module, name) for name in sorted(getattr(module, "__all__", ()))]
        for value in filter(inspect.isfunction, values):
            lines += [f"::: {value.__module__}.{value.__qualname__}", ""]
        for value in filter(inspect.isclass, values):
            lines += [f"::: {value.__module__}.{value.__qualname__}", ""]
        if len(lines) > 4:
            pages[package] = "\n".join([*lines, *_values(module)])
    return pages


def _values(module: Any) -> list[str]:
    """A table of the other public names, each with the comment of the line that defines it."""
    rows = []
    sources = [p.read_text(encoding="utf-8") for p in Path(module.__file__).parent.glob("*.py")]
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if any(test(value) for test in (inspect.isfunction, inspect.isclass, inspect.ismodule)):
            continue
        defined = (re.search(rf"^{name} = .*# (.+)$", text, flags=re.MULTILINE) for text in sources)
        comment = next(found[1] for found in defined if found)
        rows.append(f"| `{name}` | {type(value).__name__} | {comment} |")
    return ["## Values", "", "| name | type | meaning |", "|---|---|---|", *rows] if rows else []


def _commands() -> str:
    """All commands with their flags."""
    _import_all(app)
    text = app.generate_docs(heading_level=1, usage_name="seecause")
    text = text.replace(", `--no-quiet`", "").replace("<", "&lt;")
    assert all(group in text for group in HELP)
    return text


def _tutorial(notebook: Path) -> str:
    """A notebook as a page: its text, code, and what the code printed and drew."""
    lines: list[str] = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            continue
        lines += ["```python", source, "```", ""]
        for output in cell["outputs"]:
            data = output.get("data", {})
            kind = next((kind for kind in data if kind.startswith("image/")), None)
            if kind is not None:
                image = "".join(data[kind]).replace("\n", "")
                lines += [f'<img alt="Output of the code above" src="data:{kind};base64,{image}">']
            else:
                text = output.get("text") or data.get("text/plain") or []
                lines += ["```text", "".join(text).rstrip("\n"), "```"]
            lines.append("")
    return "\n".join(lines)


def _generated(link: re.Match[str]) -> str:
    """A link to the page that is made from a notebook or from a list of public names."""
    if link[1]:
        return f"](tutorials/{link[1]}.md)"
    return f"](reference/{link[2].replace('/', '.')}.md)"


def _description(markdown: str) -> str:
    """The first paragraph of prose of a page, without markup."""
    for paragraph in markdown.split("\n\n"):
        if re.match(r"[A-Z`*]", paragraph.strip()):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`]", r"\1", " ".join(paragraph.split()))
            return text[:300]
    return ""


def _replace(text: str) -> str:
    text = BLOCK.sub(lambda match: convert(match[1].strip(), display="block"), text)
    # inside a span, because a line that begins with another element would be a block of its own
    return INLINE.sub(lambda match: f"<span>{convert(match[1].strip())}</span>", text)
