"""Memory whose addresses stay while it is given back: for recorded steps over a sleep."""
