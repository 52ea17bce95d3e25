"""Run the code of the notebook with fewer steps, and check what it stores.

Its cells are plain Python, so a script is enough: nbclient and ipykernel would add thirty packages to the environment.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_model.ipynb"
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<])/\w+/|\b[A-Z]:\\")


def read_cells(kind: str) -> list[dict]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def test_the_notebook_runs(tmp_path: Path) -> None:
    code = "\n\n".join(f"# cell {number}\n{''.join(cell['source'])}" for number, cell in enumerate(read_cells("code")))
    assert "steps=150" in code
    script = tmp_path / "notebook.py"
    script.write_text(code.replace("steps=150", "steps=20"), encoding="utf-8")
    options = ["-W", "error", "-W", "ignore:FigureCanvasAgg"]  # where a display exists, Agg warns that it shows nothing
    environment = os.environ | {"MPLBACKEND": "Agg"}
    command = [sys.executable, *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Accuracy " in done.stdout
    assert (tmp_path / "image.png").is_file()
    assert len(list(tmp_path.glob("runs/*/report.html"))) == 1


def test_the_notebook_stores_results_without_paths_of_a_machine() -> None:
    outputs = [output for cell in read_cells("code") for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    for output in outputs:
        assert output["output_type"] in ("stream", "display_data")  # neither errors nor results by number
        texts = [output.get("text", []), *(text for kind, text in output.get("data", {}).items() if "text" in kind)]
        for text in map("".join, texts):
            assert not ABSOLUTE_PATH.search(text), text


def test_the_links_of_the_notebook_resolve() -> None:
    for cell in read_cells("markdown"):
        for target in re.findall(r"\]\(([^)#]+)\)", "".join(cell["source"])):
            assert (NOTEBOOK.parent / target).exists(), target
