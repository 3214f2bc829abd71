"""On what ranks train."""

CPU, CUDA = "cpu", "cuda"
DEVICES = (CPU, CUDA)
"""Cores, with gloo between ranks, or GPUs, with NCCL."""


def require_device(device: str, ranks: int) -> None:
    """Return where this host's ``ranks`` ranks can train on ``device``.

    Raises
    ------
    ValueError
        Where there is no such device, or this host has too few GPUs, or it has them: the executor's model runs on
        cores.
    """
    if device not in DEVICES:
        raise ValueError(f"device is one of {', '.join(DEVICES)}, met {device[:60]!r}")
    if device == CUDA:
        import torch

        gpus = torch.cuda.device_count()
        if gpus < ranks:
            met = f"met {gpus} GPU{'s' if gpus != 1 else ''} for {ranks} rank{'s' if ranks > 1 else ''}"
            raise ValueError(f"device: NCCL needs a GPU of its own for each rank of a host, {met}; nearest: {CPU}")
        raise ValueError(f"device: the executor's ranks train on cores, with gloo, met {CUDA}; nearest: {CPU}")
