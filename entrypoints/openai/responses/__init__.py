"""/v1/responses"""
