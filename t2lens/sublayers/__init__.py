"""The sequence axis: what a sublayer does with the read that the residual system hands it."""

from t2lens.sublayers.attention import Attention as Attention
from t2lens.sublayers.mlp import MLP as MLP
from t2lens.sublayers.norms import Norm as Norm
from t2lens.sublayers.positions import DecodingCache as DecodingCache
from t2lens.sublayers.positions import Places as Places
