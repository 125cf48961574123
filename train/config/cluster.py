"""The section `[cluster]`: the devices that a run is planned for; nothing of it changes what is computed."""

from pydantic import model_validator

from schemas.config import Section, execution


class ClusterConfig(Section):
    """Devices by the names of the plan's table, and what they cost."""

    device: str = execution("")
    """Name of the device, such as h100-sxm (an unknown name is answered with those known), or a calibration's file."""
    gpus: int | None = execution(None, ge=1)
    """Devices in a node; None = as many as a usual node has of them."""
    nodes: int = execution(1, ge=1)
    """Nodes."""
    usd_per_gpu_hour: float | None = execution(None, gt=0)
    """Price of a device for an hour [USD]; None = unknown, so no cost is shown and no budget in money is taken."""
    mfu: float = execution(0.4, gt=0, le=1)
    """Share of the dense bf16 peak by which hours of devices become FLOPs, until a layout is known. Llama 3 (arXiv
    2407.21783, table 4) reached 0.38 to 0.43."""

    @model_validator(mode="after")
    def _used(self) -> "ClusterConfig":
        """Refuse settings of a device that is not named."""
        if not self.device and (given := sorted(self.model_fields_set - {"device"})):
            raise ValueError(f"{' and '.join(given)}: device is wanted")
        return self
