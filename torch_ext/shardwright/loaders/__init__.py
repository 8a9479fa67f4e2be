"""Weight sync from a trainer to a server by the server's own loader of checkpoints.

`recorded_destination` finds the parts of the weights that a loader writes, and `in_connection` the trainer's parts, in
the forms that `sw.transfer` takes.
"""

from .destinations import recorded_destination
from .sources import in_connection

__all__ = ["in_connection", "recorded_destination"]
