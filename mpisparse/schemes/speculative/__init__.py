"""Scheme speculative: ranks update influential weights at once, and correct them when the global weights arrive.

influence    the value of a weight's update, from its gradient and the curvature of the loss; the scorer
granularity  whole layers or single weights; policy decides which; selection: what a rank sends, from step to step
local        the user's optimizer on a few elements; weights: the rank's own set and the global one
companion    the weights around the steps: correct, move ahead, drain
"""
