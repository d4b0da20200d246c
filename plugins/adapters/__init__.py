"""Adapter formats that ship in the box."""
