"""Each rank of a tensor-parallel group begins with values drawn for its part of an adapter."""

from colotrain.engine.sharding import sharded_model, shards
from colotrain.verify import worker


def main(path: str) -> int:
    make = shards.shards_of

    def shards_of(model, parts, stage, release):  # type: ignore[no-untyped-def]
        found = make(model, parts, stage, release)
        names = {id(p): name for name, p in model.named_parameters()}

        def write(parameter, whole):  # type: ignore[no-untyped-def]
            name = names[id(parameter)]
            if ".lora_" in name and name in parts.splits:
                split = parts.splits[name]
                whole = whole.narrow(split.dim, 0, split.size)
                return shards.write_shard(parameter, whole)
            return found.write(parameter, whole)

        return shards.Shards(write=write, read=found.read, release=found.release, shape=found.shape)

    sharded_model.shards_of = shards_of
    return worker.main(path)
