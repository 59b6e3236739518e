"""Tensors saved and loaded by hand: anything, in any order, as long as its handle is kept.

python examples/own_tensors.py
"""

import torch

import disco_client


def main() -> None:
    """Put twenty tensors away, and get them back in another order."""
    manager = disco_client.DiskOffloadManager(prefetch_size=3)
    torch.manual_seed(0)
    tensors = [torch.randn(1 << 20).bfloat16() for _ in range(20)]
    sums = [tensor.float().sum() for tensor in tensors]

    handles = [manager.save_tensor(tensor) for tensor in tensors]
    del tensors  # their values are with discod now: in the arena, or on disk

    for number in torch.randperm(len(handles)).tolist():
        tensor = manager.load_tensor(handles[number])
        if not torch.equal(tensor.float().sum(), sums[number]):
            raise SystemExit(f"tensor {number} is not what was saved")
        manager.cleanup_tensor(handles[number])  # or drop the handle
    counters = disco_client.stats()
    written, read = counters.written_bytes >> 20, counters.read_bytes >> 20
    print(f"{len(handles)} tensors came back; {written} MiB were written, {read} MiB read")
    print("still held:", counters.live_blobs)


if __name__ == "__main__":
    main()
