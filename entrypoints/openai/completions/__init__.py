"""/v1/completions"""
