"""Conformance kits: pytest classes that test whether a plugin keeps its protocol's contract.

Subclass a kit in a package's own tests and give it what only its author knows:

    from jackfield.plugins.conformance.attention import AttentionBackendKit

    class TestMine(AttentionBackendKit):
        name = "mine"

or check a registered name from the shell, nothing written:

    pytest --pyargs jackfield.plugins.conformance --attention-backend mine

The kits need pytest and hypothesis (`pip install pytest hypothesis`).
"""
