"""On what ranks train, by name; `executor.accelerator` is what each name means."""

CPU, CUDA = "cpu", "cuda"
DEVICES = (CPU, CUDA)
"""Cores, with gloo between ranks, or GPUs, with NCCL."""


def require_device(device: str, ranks: int) -> None:
    """Return where this host has a device for each of ``ranks`` ranks: of cores any number, of GPUs one each.

    Raises
    ------
    ValueError
        Where there is no such device, or this host has too few GPUs.
    """
    if device not in DEVICES:
        raise ValueError(f"--device: {' or '.join(DEVICES)}, met {device[:60]!r}; nearest: {CPU}")
    if device == CUDA:
        import torch

        gpus = torch.cuda.device_count()
        if gpus < ranks:
            near = f"a plan of {gpus} rank{'s' if gpus > 1 else ''}, or --device {CPU}" if gpus else f"--device {CPU}"
            needs = f"{ranks} GPU{'s' if ranks > 1 else ''}"
            raise ValueError(f"--device: cuda needs {needs}, one for each rank of a host, met {gpus}; nearest: {near}")
