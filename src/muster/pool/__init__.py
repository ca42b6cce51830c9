"""Pools of worker processes that know no env: how these start, answer, are watched, replaced and closed."""
