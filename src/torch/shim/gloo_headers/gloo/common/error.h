// Stand-in: libtorch's ProcessGroupGloo.hpp includes this header and uses nothing of it.
#pragma once
