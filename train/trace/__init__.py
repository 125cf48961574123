"""The trace: the documents of an optimizer step, and the steps and checkpoints that were trained on a document.

Both are computed from the dataset's manifest, the plan and the skip list; training logs nothing for the trace.
"""

from train.trace.trace import Appearance, FoundDocument, Trace, documents_of_step, open_trace, steps_of_url

__all__ = [
    "Appearance",
    "FoundDocument",
    "Trace",
    "documents_of_step",
    "open_trace",
    "steps_of_url",
]
