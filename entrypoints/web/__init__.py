"""The playground: a page for people, served at `/`."""
