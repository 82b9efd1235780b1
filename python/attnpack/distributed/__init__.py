"""attnpack on several processes of ``torch.distributed``: context parallelism, tensor parallelism, sharded caches, and
rules by which DTensors run through the ops. Imported by name: ``import attnpack.distributed``."""

from .attention import attention
from .layouts import shard_sequence, unshard_sequence
from .rules import register_rules

register_rules()

__all__ = ["attention", "shard_sequence", "unshard_sequence"]
