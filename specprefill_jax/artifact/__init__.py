"""Artifacts, where the compile side and the serve side meet: schema, hashing, locating, verifying."""
