"""Do messages overlap with the backward pass? A step with gradients in buckets against one with a message after it.

    python benchmarks/overlap.py [--model cvt_13] [--block-ms 40] [--processes 2] [--out benchmarks/results]

Processes on this machine, one thread each, with two small pictures; GPUs and the link between them are simulated by
sleeping. Each block sleeps in the forward pass, and twice as long in the backward pass, as if it were computed
elsewhere. A message begins when all processes have it, waits for those before it, and takes as long as it has bytes.
The bandwidth is chosen so that all gradients take a given share of the time of a step without messages. Buckets are
those of `weft.engine.parallel.distribute`, sent from a communication hook; the other way is one message of all
gradients when the backward pass is over. All are measured in turns; medians over the rounds. Before that both ways send
their gradients in earnest, with gloo, and must get the same.
"""

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

import weft
from weft.engine.device import fsdp_units, num_parameters
from weft.engine.parallel import distribute


class Link:
    """A network of its own for each process: messages leave one after the other, and take as long as they are."""

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0  # 0: messages are sent in earnest
        self.pool = ThreadPoolExecutor(1)

    def average(self, values: Tensor) -> Tensor:
        if not self.seconds_per_byte:
            dist.all_reduce(values)
            return values.div_(dist.get_world_size())
        dist.all_reduce(torch.zeros(1))  # all are here
        time.sleep(values.nbytes * self.seconds_per_byte)
        return values

    def hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sends a bucket while the backward pass goes on."""
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        self.pool.submit(lambda: done.set_result(self.average(bucket.buffer())))
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cvt_13")
    parser.add_argument("--block-ms", type=float, default=40, help="of the forward pass of each block")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.1, 0.3, 0.6, 0.9], help="of the message in a step"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder for a JSON file with the numbers")
    args = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    torch.multiprocessing.spawn(work, (args,), nprocs=args.processes)


def work(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=args.processes)
    model = weft.create_model(args.model, num_classes=1000, img_size=32, drop_path_rate=0.0)
    slow_down(model, args.block_ms / 1000)
    x = torch.rand(2, 3, 32, 32) + rank  # others in each process
    link = Link()
    steps = make_steps(model, x, link)
    seconds = measure({"compute": steps["compute"]}, args.rounds)["compute"]
    size = 4 * sum(p.numel() for p in model.parameters())
    rows = []
    for share in args.shares:
        link.seconds_per_byte = share * seconds / size
        found = measure(steps, args.rounds)
        message = share * seconds
        hidden = 1 - (found["buckets"] - found["compute"]) / (found["message after it"] - found["compute"])
        rows.append({"share": share, "message": message, **found, "hidden": hidden})
        rows[-1]["ratio"] = found["message after it"] / found["buckets"]
        if rank == 0:
            say(rows[-1])
    if rank == 0 and args.out:
        write(args, size, rows)
    dist.destroy_process_group()


def slow_down(model: nn.Module, seconds: float) -> None:
    """Lets the blocks of a model take time; a backward pass takes twice that of a forward pass."""
    units = list(fsdp_units(model, num_parameters(model) // 4))
    for unit in units:
        if not any(other in units for other in unit.modules() if other is not unit):
            unit.register_forward_pre_hook(lambda *_: time.sleep(seconds))
            unit.register_full_backward_pre_hook(lambda *_: time.sleep(2 * seconds))


def make_steps(model: nn.Module, x: Tensor, link: Link) -> dict[str, Callable[[], None]]:
    """Forward and backward passes, without messages and in both ways to send gradients; these give the same ones."""

    def step(forward: nn.Module) -> None:
        forward.zero_grad(set_to_none=True)
        forward(x).square().mean().backward()

    plain, twin = model, copy.deepcopy(model)
    distributed = distribute(twin, step)
    distributed.register_comm_hook(None, link.hook)

    flat = torch.empty(sum(p.numel() for p in plain.parameters()))

    def send_after() -> None:
        step(plain)
        link.average(flat)

    step(plain)
    expected = link.average(torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None]))
    step(distributed)
    found = torch.cat([p.grad.reshape(-1) for p in twin.parameters() if p.grad is not None])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    return {"compute": lambda: step(plain), "message after it": send_after, "buckets": lambda: step(distributed)}


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds until all processes have made a step: the median."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.monotonic()
            step()
            dist.barrier()
            times[name].append(time.monotonic() - start)
    box: list[Any] = [{name: statistics.median(values) for name, values in times.items()}]
    dist.broadcast_object_list(box)  # the same bandwidth everywhere
    return box[0]


def say(row: dict[str, float]) -> None:
    times = "  ".join(f"{name} {1000 * row[name]:6.0f} ms" for name in ("compute", "message after it", "buckets"))
    print(f"message {row['share']:.0%} of a step:  {times}  ratio {row['ratio']:.2f}  hidden {row['hidden']:.0%}")


def write(args: argparse.Namespace, size: int, rows: list[dict[str, float]]) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    facts = {key: value for key, value in vars(args).items() if key != "out"}
    rows = [{key: round(value, 4) for key, value in row.items()} for row in rows]
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()}  # with other work on it, times are noise
    result = {"date": date.today().isoformat(), "torch": torch.__version__, **machine, **facts}
    result |= {"gradient_bytes": size, "rows": rows}
    (args.out / f"overlap-{result['date']}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
