"""attnpack on several processes of ``torch.distributed``: context parallelism, tensor parallelism, sharded caches, and
rules by which DTensors run through the ops. Imported by name: ``import attnpack.distributed``."""

from .attention import attention
from .context_parallel import context_parallel
from .layouts import shard_sequence, unshard_sequence
from .rules import register_rules
from .sharded_cache import ShardedCache
from .tensor_parallel import tensor_parallel

register_rules()

__all__ = ["ShardedCache", "attention", "context_parallel", "shard_sequence", "tensor_parallel", "unshard_sequence"]
