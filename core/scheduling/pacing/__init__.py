"""When the next step is planned, and how long it is."""
