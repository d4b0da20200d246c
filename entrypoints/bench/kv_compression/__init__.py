"""`jackfield bench kv-compression`: what each KV compressor costs in quality, on any checkpoint."""
