"""Data parallelism: several engines with the same model behind one server, each in processes of its
own."""
