"""Who holds a job, how often it was started, how it ends: everything that touches the streams on
the worker side.
"""
