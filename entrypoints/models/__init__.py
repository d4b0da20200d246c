"""Models by name on this machine: aliases, the hub's cache, copies of object stores."""
