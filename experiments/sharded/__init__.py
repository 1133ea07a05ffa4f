"""A transformer that groups of devices shard, trained on text and compiled.

- `model`: the transformer in Flax NNX, its sizes, and how a group shards it.
- `nanogpt`: its training on characters, in the configuration that nanoGPT documents.
- `compiled`: what hides the exchange on GPUs and TPUs that need not be there.
- `cluster`: its step time on an emulated cluster.
"""
