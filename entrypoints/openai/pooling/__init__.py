"""Embeddings, classification, scores: /v1/embeddings, /pooling, /classify, /score, /rerank."""
