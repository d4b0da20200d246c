"""The plugins that ship with Jackfield, registered through the same entry points as third-party
ones."""
