"""Routes that change an engine while it serves, in two dialects over one surface."""
