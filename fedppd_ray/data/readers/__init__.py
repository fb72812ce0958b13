"""Readers, one file format a module."""
