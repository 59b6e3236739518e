"""What ``discod doctor`` looks at: one kind of thing per module, each gives findings.

Nothing here changes anything: files for probes never have a name, where the file system can do
that. Nothing needs root, torch or a daemon.
"""
