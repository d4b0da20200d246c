"""Authentication of requests: API keys, tenants, their usage."""
