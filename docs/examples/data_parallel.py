"""Data-parallel training over processes, on one machine or many: `gradients` and `apply` around an all-reduce.

    torchrun --nproc-per-node 2 data_parallel.py digits.onnx digits.npz trained.onnx     # torch.distributed, gloo
    mpirun -n 2 python data_parallel.py digits.onnx digits.npz trained.onnx              # mpi4py

Every rank takes its share of each batch. The gradients are averaged over the ranks, so that every rank makes the update of the whole batch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np
import pullback

Mean = Callable[[np.ndarray], None]


def torch_ranks() -> tuple[int, int, Mean]:
    """This rank, their number, and the mean over them in place, by torch.distributed."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()

    def mean(array: np.ndarray) -> None:
        dist.all_reduce(torch.from_numpy(array))
        array /= ranks

    return dist.get_rank(), ranks, mean


def mpi_ranks() -> tuple[int, int, Mean]:
    """The same by MPI."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def mean(array: np.ndarray) -> None:
        world.Allreduce(MPI.IN_PLACE, array, op=MPI.SUM)
        array /= world.size

    return world.rank, world.size, mean


def main(model: str, data: str, trained: str, epochs: int = 1, batch_size: int = 32) -> None:
    rank, ranks, mean = torch_ranks() if "WORLD_SIZE" in os.environ else mpi_ranks()
    step = pullback.training_step(model, loss="cross_entropy", optimizer="adamw", lr=2e-3)
    trainer = pullback.Trainer(step, threads=1)
    with np.load(data) as archive:
        x, target = archive["image"], archive["target"]
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(x))  # the same on every rank
        for start in range(0, len(x) - batch_size + 1, batch_size):
            mine = order[start : start + batch_size][rank::ranks]
            loss, gradients = trainer.gradients({"image": x[mine], "target": target[mine]})
            for gradient in gradients.values():
                mean(gradient)
            trainer.apply(gradients)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}")
    if rank == 0:
        trainer.export(trained)


if __name__ == "__main__":
    model, data, trained = sys.argv[1:4]
    main(model, data, trained)
