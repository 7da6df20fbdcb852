"""The sequence axis: what a sublayer does with the read that the residual system hands it."""

from t2lens.sublayers.attention import Attention as Attention
from t2lens.sublayers.bucket_attention import BucketAttention as BucketAttention
from t2lens.sublayers.bucket_attention import RelativeTable as RelativeTable
from t2lens.sublayers.mlp import MLP as MLP
from t2lens.sublayers.norms import Norm as Norm
from t2lens.sublayers.positions import DecodingCache as DecodingCache
from t2lens.sublayers.positions import Places as Places
from t2lens.sublayers.short_conv import LocalConv as LocalConv
from t2lens.sublayers.short_conv import LocalMixer as LocalMixer
