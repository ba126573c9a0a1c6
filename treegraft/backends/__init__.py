"""Tree backends, the KV slab and the adapter for models of transformers."""
