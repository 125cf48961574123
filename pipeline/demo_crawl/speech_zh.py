"""Chinese sentences for the demo crawl."""

from pipeline.demo_crawl.speech import Speech

CHINESE = Speech(
    language="zh",
    menu=("首页", "文章", "活动", "关于我们", "联系方式"),
    titles=("{place}的一天", "关于{topic}的笔记", "{person}和{object}", "谈谈{topic}"),
    templates=(
        "{past}，{person}在{place}找到了{object}。",
        "{person}{past}卖掉了{object}。",
        "{often}{person}坐在{place}看书。",
        "{thing}{past}显得{state}。",
        "{person}在{place}寻找{object}，{reason}。",
        "没有人知道{person}为什么留着{object}。",
        "{often}{thing}总是{state}。",
        "花{number}块钱，就能在{place}买到{object}。",
        "听说{person}{past}丢了{object}。",
        "{reason}，{person}站在{place}等朋友。",
        "{thing}是不是{state}，{person}最清楚。",
        "后来{person}把{object}带回了家。",
        "也许{person}还能在{place}找到{object}。",
        "过了{number}个小时，{person}才想起{object}。",
        "{number}年来，{person}一直在{place}卖{object}。",
        "可惜{thing}{past}变得{state}。",
        "{person}和{number}个朋友{past}参观了{topic}的展览。",
        "{often}{person}喜欢谈论{topic}。",
        "如果{thing}{state}，{person}就留在家里。",
        "在{person}看来，{thing}确实{state}。",
        "{past}，{place}举行了一场介绍{topic}的讲座。",
        "{person}刚拿起{object}，外面就下起了雨。",
        "{often}{person}打开窗户，听小鸟唱歌。",
        "不管怎样，{person}还是保存着{object}。",
        "想了解{topic}的人，{often}会去图书馆。",
        "{place}贴着一张介绍{topic}的海报，已经{number}个星期了。",
        "幸好{person}带着{object}，{reason}。",
        "最后大家都很满意，因为{thing}{state}。",
        "{person}在{place}给孩子们看{object}。",
        "从前{place}有{number}家小店，现在只剩下{object}。",
        "{past}的报纸上有一篇文章，讲的是{topic}。",
        "{reason}，{person}终于找到了{object}。",
        "只有{person}相信{thing}{state}。",
        "{number}分钟以后，{person}回来取{object}。",
        "{past}，{person}在{place}遇见了一位老朋友。",
        "大家{past}聊的是{topic}。",
        "没有{object}，{person}{often}不出门。",
        "{person}说，{topic}比{object}更有意思。",
        "{often}我们会看见{person}带着{object}经过{place}。",
        "读了{number}页书以后，{person}对{topic}有了新的看法。",
    ),
    phrases={
        "past": (
            "昨天晚上 / 三个星期以前 / 去年夏天 / 上个星期五 / 一个有雾的早晨 / 春节前几天 / 半夜时分 / 暴雨过后 / "
            "很多年以前 / 开学第一天"
        ),
        "often": "每天早上 / 周末 / 到了秋天 / 傍晚 / 天气好的时候 / 有时候 / 平时 / 冬天 / 下班以后",
        "person": (
            "村里的面包师 / 我的奶奶 / 一位老渔夫 / 年轻的老师 / 我们的邻居 / 一位园丁 / 列车员 / 来自南京的学生 / "
            "镇长 / 我哥哥 / 钟表匠 / 远方的旅客 / 图书管理员 / 磨坊主人 / 热心的邮递员"
        ),
        "object": (
            "一篮苹果 / 那辆旧自行车 / 一把瓷茶壶 / 地下室的钥匙 / 一封长信 / 附近的地图 / 刚出炉的面包 / "
            "一本讲鸟类的书 / 一盒照片 / 暖和的手套 / 前一天的报纸 / 一束郁金香 / 李子蛋糕的做法 / 一盏新台灯 / "
            "绿色的雨伞"
        ),
        "place": (
            "集市广场 / 教堂后面 / 湖边 / 小作坊里 / 市政厅门前 / 博物馆的花园 / 老水磨旁边 / 车站 / 桥上 / "
            "安静的小巷 / 菩提树下 / 山坡上 / 港口 / 厨房里"
        ),
        "reason": (
            "因为雨下得很大 / 虽然商店已经关门 / 外面响起钟声的时候 / 客人到来之前 / 火车开走以后 / 太阳出来的时候 / "
            "由于道路不通 / 因为停电了"
        ),
        "topic": (
            "城市的历史 / 稀有植物 / 蜜蜂的生活 / 古代地图 / 烹饪的艺术 / 小提琴的制作 / 遥远的国家 / 冬天的星空 / "
            "河上的航运 / 好书的价值"
        ),
        "thing": (
            "那座老桥 / 新的时刻表 / 街角的咖啡馆 / 这次展览 / 通往湖边的路 / 喷泉里的水 / 塔上的风景 / "
            "公园里的音乐会 / 老作坊 / 今天的汤"
        ),
        "state": (
            "格外便宜 / 太吵闹 / 十分凉爽 / 相当古老 / 难以辨认 / 特别美丽 / 有些昂贵 / 几乎没有人 / 很受欢迎 / "
            "有点奇怪"
        ),
        "number": "两 / 三 / 四 / 五 / 七 / 八 / 十 / 十二 / 二十",
    },
    space="",
)
