"""Code that the client, the trainer and the server share.

It imports nothing of theirs. A module that needs a package which one of the extras lacks says so.
"""
