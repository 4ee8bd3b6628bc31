"""Scheme speculative: ranks update what is influential at once, and are corrected when the global weights come.

influence   what a weight's update is worth: its gradient and the curvature of the loss
granularity whole layers or single weights; policy decides which
message     what a rank sends of a step, and what comes back; inflight carries it beside the computation
local       the user's optimizer on a few elements; weights: the rank's own set and the global one
step        the order of all that
"""
