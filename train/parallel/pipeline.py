"""Pipeline parallelism: stages of layers on different ranks, and the schedule of micro-batches over them.

GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B and interleaved (Narayanan et al. 2021, arXiv 2104.04473), zero bubble
and ZBV (Qi et al. 2023, arXiv 2401.10241), as torch runs them. Attention masks are never sent: each stage builds its
own from the document numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from schemas.errors import ConfigError
from train.config.layout import SPLIT_BACKWARD, LayoutConfig
from train.data.rows import Rows
from train.model.transformer import Transformer
from train.parallel.layout import stages_of
from train.parallel.ranks import Mesh

SINGLE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI_STAGE = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
FIRST_SPLIT_BACKWARD = (2, 13)
"""First torch version that correctly computes the gradients of the weights alone.

Version 2.11 fails at nodes with several outputs, and at nodes written in Python."""


def check_schedule(layout: LayoutConfig) -> None:
    """Check that this torch computes the gradients of a schedule correctly. Raises ConfigError if it does not."""
    version = torch.__version__
    if layout.schedule in SPLIT_BACKWARD and tuple(map(int, version.split(".")[:2])) < FIRST_SPLIT_BACKWARD:
        first = ".".join(map(str, FIRST_SPLIT_BACKWARD))
        raise ConfigError(
            f"layout.schedule: expected torch {first} or newer for {layout.schedule}, got {version}. "
            "Set layout.schedule = interleaved, or install a newer torch."
        )


class Pipeline:
    """The pipeline stages of this rank, with forward and backward passes over the micro-batches of a step."""

    def __init__(self, parts: Sequence[Transformer], stages: Sequence[int], mesh: Mesh, layout: LayoutConfig):
        """`parts`: the layers of each stage on this rank. `stages`: the numbers of these stages. Raises ConfigError as
        `check_schedule` does."""
        check_schedule(layout)
        self._parts, self._stages, self._mesh, self._layout = parts, stages, mesh, layout
        self._schedules: dict[tuple[int, int, int, torch.dtype], PipelineScheduleSingle | PipelineScheduleMulti] = {}

    def run(self, rows: Rows, number: int, stream: torch.dtype) -> None:
        """Run forward and backward passes of `number` micro-batches; `stream`: dtype of tensors sent between stages."""
        schedule = self._schedule(len(rows) // number, rows.inputs_BT.shape[1], number, stream)
        named: dict[str, Any] = {"targets_BT": rows.targets_BT, "sources_B": rows.sources_B, **rows.draws}
        if rows.documents_BT is not None:
            named["documents_BT"] = rows.documents_BT
        if any(part.value_embeddings is not None for part in self._parts):
            named["ids_BT"] = rows.inputs_BT
        # Inputs enter the first stage; every other stage receives its input from the previous stage.
        inputs = [rows.inputs_BT] if 0 in self._stages else []
        # The output of the last stage is the loss already; the `target` argument is required but unused.
        schedule.step(*inputs, target=rows.sources_B, return_outputs=False, **named)

    def measure(self, parts: Sequence[Rows], stream: torch.dtype) -> None:
        """Run micro-batches forward through all stages. The last stage adds the losses to its `loss.tally`."""
        # Torch's schedules are not used: they require the number of micro-batches they were built for, and zbv cannot
        # run without a backward pass.
        group, rank_here = self._mesh.group("pipeline"), self._mesh.place("pipeline")
        owner = {stage: rank for rank in range(group.size()) for stage in stages_of(self._layout, rank)}
        for rows in parts:
            x = rows.inputs_BT
            for stage, part in zip(self._stages, self._parts, strict=True):
                if stage and owner[stage - 1] != rank_here:
                    width = rows.inputs_BT.shape[1] // self._mesh.axes["tensor"]
                    x = torch.empty(len(rows), width, part.shape.d_model, dtype=stream, device=rows.inputs_BT.device)
                    dist.recv(x, group=group, group_src=owner[stage - 1])
                x = part(x, rows.documents_BT, rows.targets_BT, rows.sources_B, ids_BT=rows.inputs_BT)
                if stage + 1 < len(owner) and owner[stage + 1] != rank_here:
                    dist.send(x.contiguous(), group=group, group_dst=owner[stage + 1])

    def _schedule(
        self, rows: int, width: int, number: int, stream: torch.dtype
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        key = rows, width, number, stream
        if key not in self._schedules:
            built: list[Any] = [
                self._stage(part, stage, rows, width, stream)
                for part, stage in zip(self._parts, self._stages, strict=True)
            ]
            name = self._layout.schedule
            settings: dict[str, Any] = {"loss_fn": _identity_loss, "scale_grads": False}
            if name in SINGLE_STAGE:
                self._schedules[key] = SINGLE_STAGE[name](built[0], number, **settings)
            else:
                self._schedules[key] = MULTI_STAGE[name](built, number, **settings)
        return self._schedules[key]

    def _stage(self, part: Transformer, stage: int, rows: int, width: int, stream: torch.dtype) -> PipelineStage:
        # Shapes are passed explicitly, because inferring them would run the model once and count its losses.
        number = self._mesh.axes["pipeline"] * self._layout.stages
        between = torch.empty(
            rows,
            width // self._mesh.axes["tensor"],
            part.shape.d_model,
            dtype=stream,
            device="meta",
            requires_grad=True,
        )
        ids = torch.empty(rows, width, dtype=torch.int64, device="meta")
        total = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        device = next(part.parameters()).device
        return PipelineStage(
            part,
            stage,
            number,
            device,
            input_args=ids if stage == 0 else between,
            output_args=total if stage == number - 1 else between,
            group=self._mesh.group("pipeline"),
        )


def _identity_loss(output: Tensor, target: Tensor) -> Tensor:
    return output
