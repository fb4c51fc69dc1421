"""Rollouts are made from tokens: the turn loop, groups and evaluation."""
