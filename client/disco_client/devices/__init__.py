"""Devices other than the CPU: how their tensors reach the arena and come back.

``interface.py`` says what a device does, ``streamed.py`` does it with any accelerator's streams,
:mod:`disco_client.cuda` adds what only CUDA has, ``known.py`` finds the one for a tensor. When to
copy what is decided in :mod:`disco_client.staging`.
"""
