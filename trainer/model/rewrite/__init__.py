"""Rewriting of exported dense nets for requests of one user and many candidates.

`reading` turns an exported net into a graph; each rule gives equal graphs; `search` takes the
cheapest by measured `costs`; `programs` makes torch modules of it (docs/design/0029-rewriting.md).
"""
