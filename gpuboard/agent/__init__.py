"""The only code that runs on a GPU node: standard library and pynvml, Python 3.6 and later.

It travels over the connection (gpuboard.transport.bundle) and leaves no files on the node.
"""
