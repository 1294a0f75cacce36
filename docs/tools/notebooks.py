"""Run the notebooks of the documentation and store their output: ``python -m docs.tools.notebooks [NAME ...]``.

A cell runs as in Jupyter: it prints, and its last expression is shown as HTML, as a figure or as text. The notebooks in
``docs/start`` are the source; edit them in Jupyter or as text, then run this. `rendered` is their text on the site.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

START = Path(__file__).resolve().parents[1] / "start"
NOTEBOOKS = sorted(START.glob("*.ipynb"))


def run_notebook(path: Path, folder: str) -> dict[str, Any]:
    """Run all cells of a notebook in a folder, and return the notebook with its output."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for count, cell in enumerate(codes, 1):
            cell |= {"execution_count": count, "outputs": run_cell("".join(cell["source"]), namespace)}
    return notebook


def run_cell(code: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one cell, and return its output in the format of notebooks."""
    body = ast.parse(code).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) and not code.rstrip().endswith(";") else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace) if last else None  # noqa: S307
    outputs = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        outputs.append({"data": shown(value), "metadata": {}, "output_type": "display_data"})
    return outputs


def shown(value: Any) -> dict[str, Any]:
    """Return a value by media type: a figure as PNG, everything else as text, and as HTML if it has a form in it."""
    if hasattr(value, "savefig"):
        buffer = io.BytesIO()
        value.savefig(buffer, format="png", dpi=90)
        return {"image/png": base64.b64encode(buffer.getvalue()).decode()}
    text = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        text["text/html"] = value._repr_html_().splitlines(keepends=True)
    return text


def rendered(path: Path) -> str:
    """Return a notebook as Markdown, without its title."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.split("\n", 1)[1] if source.startswith("# ") and not parts else source)
        else:
            parts += [f"```python\n{source}\n```", *map(_rendered_output, cell["outputs"])]
    return "\n\n".join(parts)


def _rendered_output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img class="output" alt="Output of the cell above" src="data:image/png;base64,{data["image/png"]}">'
    if "text/html" in data:
        html = "".join(data["text/html"])
        return '<div class="output">' + "".join(line.strip() for line in html.splitlines()) + "</div>"
    return "```text\n" + "".join(output.get("text", data.get("text/plain", []))).rstrip("\n") + "\n```"


def main(names: list[str]) -> None:
    """Run all notebooks, or those that are named."""
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                notebook = run_notebook(path, folder)
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
