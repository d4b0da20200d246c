"""Any causal model of `transformers`: its modules, over the cache and the scheduling here."""
