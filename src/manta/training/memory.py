"""How many samples fit on the device at a time: found by trying, and told when memory ran out."""

import dataclasses
import gc
import json
import math
import os
import socket
from pathlib import Path

import torch

from manta.config import Config, Data
from manta.errors import FAILED, MantaError
from manta.runs import META, with_way_out
from manta.training.learner import Learner
from manta.training.loader import first_target
from manta.training.parallel import bare
from manta.training.rng import rng_state, set_rng_state

AUTO = "auto"
# What torch raises as plain RuntimeErrors: the CPU's allocator, and libraries that ask the driver themselves.
_MARKS = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)
_SPARE = 0.02  # of the device's memory is left free by what is found: it is never without gaps


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(mark in str(error) for mark in _MARKS)


def settled(config: Config, number: int | None) -> Config:
    """The configuration with what `data.micro_batch_size=auto` stands for; None = the whole share."""
    if config.data.micro_batch_size != AUTO:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, micro_batch_size=number))


def settled_for(config: Config, checkpoint: Path) -> Config:
    """The same for a checkpoint, which knows what was found."""
    return settled(config, json.loads((checkpoint / META).read_text()).get("micro_batch_size"))


def find_micro_batch(learner: Learner, share: int) -> int:
    """The largest of share, share / 2, share / 4 ... samples that fits on every rank; nothing is changed by trying.

    Raises:
        MantaError: not even one does.
    """
    session, count = learner.session, share
    while True:
        session.pulse(f"trying a micro-batch of {count}")
        if all(session.gather(fits(learner, count, passes=1 if count == share else 2))):
            return count
        if count == 1:
            raise MantaError(f"data.micro_batch_size=auto: not even one sample fits. {_SMALLER}", code=FAILED)
        count = math.ceil(count / 2)


def explain(learner: Learner, data: Data, said: str, share: int) -> MantaError:
    """What to change after memory ran out in the middle of training. No frame may hold on to what was on the device."""
    session = learner.session
    evaluating = session.pulse.phase.startswith("evaluating")
    micro = data.micro_batch_size if isinstance(data.micro_batch_size, int) else None
    key, size = "data.micro_batch_size", min(micro or share, share)
    if evaluating:
        key, size = "data.eval_batch_size", data.eval_batch_size or micro or share
    learner.optimizer.zero_grad(set_to_none=True)
    release(session.device)
    count = size
    found = None
    while count > 1 and found is None:
        count = math.ceil(count / 2)
        session.pulse.phase = f"trying {key}={count}"
        found = count if fits(learner, count, passes=0 if evaluating else 2) else None
    who = f"{session.device} of rank {session.rank} (pid {os.getpid()} on {socket.gethostname()})"
    message = f"Out of memory on {who} at step {session.pulse.step}, with {size} samples at a time: {said}"
    if found is None:
        return MantaError(f"{message} Not even one fits. {_SMALLER}", code=FAILED)
    auto = "" if evaluating else " data.micro_batch_size=auto finds it before training."
    message += f" {key}={found} fits (tried), with the same global batch and the same results.{auto}"
    return MantaError(message if session.watched else with_way_out(message, session.run, f"{key}={found}"), code=FAILED)


_SMALLER = "Take a smaller model, training.precision=bf16, or a device with more memory."


def fits(learner: Learner, count: int, passes: int) -> bool:
    """Whether so many samples at a time fit: tried on this rank alone, with everything put back afterwards.

    Args:
        passes: forward and backward; a second one has the gradients of the first in memory. 0 = forward only.
    """
    device, model = learner.session.device, bare(learner.model)
    rng, buffers = rng_state(device), {name: buffer.clone() for name, buffer in model.named_buffers()}
    fine = True
    try:
        _try(learner, count, passes)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        fine = False
    # The frames that held the batch are gone only now.
    learner.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    set_rng_state(rng, device)
    release(device)
    return fine


def _try(learner: Learner, count: int, passes: int) -> None:
    device, model, precision = learner.session.device, bare(learner.model), learner.precision
    shape, token_ids = learner.config.data.input_shape, learner.config.data.input_dtype == "int64"
    inputs = torch.zeros(count, *shape, dtype=torch.int64 if token_ids else precision.dtype, device=device)
    target = first_target(learner.train_set).to(device)
    targets = target.expand(count, *target.shape)
    reserved = []
    if passes and not learner.optimizer.state:  # which the first step makes: two numbers a weight, as Adam does
        reserved += [torch.empty_like(p) for p in learner.parameters for _ in range(2)]
    if device.type == "cuda":
        spare = int(_SPARE * torch.cuda.get_device_properties(device).total_memory)
        reserved.append(torch.empty(spare, dtype=torch.uint8, device=device))
    if not passes:
        with torch.no_grad(), learner.evaluating() as judged, precision.context():
            judged(inputs)
    for _ in range(passes):
        with precision.context():
            loss = learner.task.loss(model(inputs), targets)
        (loss * 0.0).backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what nothing refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
