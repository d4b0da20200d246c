"""Mixtures of experts: routing, sorting, products, combination."""
